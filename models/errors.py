"""The one exception for mistakes of the user's."""


class UserError(ValueError):
    """A mistake of the user's: in one line, what is wrong and what to do.

    The command line prints it and exits with 2.
    """


def require_at_least(name: str, value: float, least: float = 1) -> None:
    """Refuse a setting below `least`."""
    if not value >= least:
        raise UserError(f"{name} {value}: give at least {least}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that says anything, for a message of one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
