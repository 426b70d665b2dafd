"""Errors a user can cause. Messages say the fault, the value got, the allowed values, and the change."""


class MtpJaxError(Exception):
    """Base class: the command line prints its message without a traceback."""


class ConfigError(MtpJaxError, ValueError):
    """A model or engine configuration that cannot work."""


class CheckpointError(MtpJaxError, ValueError):
    """A checkpoint directory that is damaged, incomplete or of an unsupported kind."""


class RequestError(MtpJaxError, ValueError):
    """A prompt or sampling option that cannot be served."""


class PromptTooLong(RequestError):
    """A prompt that leaves no room for an answer."""


class Overloaded(MtpJaxError):
    """Nothing more can be taken now.

    Attributes:
        retry_after: seconds after which to try again.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStopped(MtpJaxError):
    """The engine has failed, is shutting down, or has not been started in this event loop: it takes no
    requests."""
