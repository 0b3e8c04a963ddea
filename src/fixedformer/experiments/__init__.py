"""Whole experiments as functions of seeds: they return records, and know no terminal and no files but the package's."""
