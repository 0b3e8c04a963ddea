"""One small hierarchy. Each message says what was needed, what came, and what to do about it."""


class FixedformerError(Exception):
    """Anything this package refuses to do. The command line prints it as one line and exits with 2."""


class SpecError(FixedformerError, ValueError):
    """Shapes, kinds or values that do not fit the statement being computed."""


class CapacityError(SpecError):
    """A machine too narrow for what it should hold, or an object too large for memory (the message gives the bytes)."""


class CertificateError(FixedformerError):
    """A certificate that was required to hold does not."""


class DivergedError(FixedformerError):
    """Training came to a loss that is no number."""


class StorageError(FixedformerError):
    """A file that is corrupt, foreign, of another kind, or that cannot be written."""
