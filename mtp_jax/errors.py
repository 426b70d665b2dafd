"""Errors a user can cause. Messages say what was wrong, what was got, what is allowed, what to change."""


class MtpJaxError(Exception):
    """Base class: the command line prints its message without a traceback."""


class ConfigError(MtpJaxError, ValueError):
    """A model or engine configuration that cannot work."""


class CheckpointError(MtpJaxError, ValueError):
    """A checkpoint directory that is damaged, incomplete or of an unsupported kind."""


class RequestError(MtpJaxError, ValueError):
    """A prompt or sampling option that cannot be served."""
