"""One training loop for everything that is trained here. It yields records; it knows no files and no terminal."""
