"""The exceptions of this package, by what the caller can do."""


class SteadfastError(Exception):
    """An error of Steadfast. Raised itself only for internal errors; the log of the process has more."""


class InvalidError(SteadfastError, ValueError):
    """The input is invalid: a job file, a setting, a model. A retry without changes fails again."""


class UnavailableError(SteadfastError, ConnectionError):
    """etcd, the master or a store does not answer; retry."""


class DeniedError(SteadfastError, PermissionError):
    """The caller lacks permission, or this machine computes other bits than the rest of the job."""


class NotFoundError(SteadfastError, LookupError):
    """What was asked for does not exist."""


class ConflictError(SteadfastError):
    """Something else exists in its place, such as a job of the same name with another job file."""
