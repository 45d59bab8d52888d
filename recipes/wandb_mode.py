"""Whether Weights & Biases takes a run's metrics as they come, or keeps them in the run's folder for `wandb sync`."""

import os
import socket
from urllib.parse import urlsplit

from recipes.errors import UserError

SECONDS = 3.0


def wandb_mode() -> str:
    """`WANDB_MODE` of a new run: the user's, else `online` where an account is known and the server answers, else `offline`.

    Raises UserError when the server answers and refuses the account.
    """
    if chosen := os.environ.get("WANDB_MODE"):
        return chosen
    import wandb  # takes seconds

    server = urlsplit(wandb.setup().settings.base_url)
    port = server.port or (80 if server.scheme == "http" else 443)
    try:  # first: login() asks the server too, and fails where there is none
        socket.create_connection((server.hostname, port), timeout=SECONDS).close()
    except OSError:
        return "offline"
    try:
        known = wandb.login(prompt=False)  # the run itself has no terminal to ask at
    except wandb.Error as error:
        raise UserError(
            f"trainer.logger has wandb, and {server.hostname} refuses the account ({str(error).splitlines()[0]}). "
            "Correct it with `wandb login`, or set WANDB_MODE=offline."
        ) from error
    return "online" if known else "offline"
