"""The error that a recipe shows to its user without a traceback."""


class UserError(Exception):
    """Something the user can put right. The message names what is wrong (key and value) and the remedy."""
