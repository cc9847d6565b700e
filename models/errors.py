"""The one exception for mistakes of the user's."""


class UserError(ValueError):
    """What is wrong and what to do, in one line. The command line prints it and exits with 2."""
