"""Whether Weights & Biases takes a run's metrics as they come, or keeps them in the run's folder for `wandb sync`."""

import os
import socket
from urllib.parse import urlsplit

SECONDS = 3.0


def wandb_mode() -> str:
    """`WANDB_MODE` of a new run: the user's, else `online` where an account is known and the server answers, else `offline`."""
    if chosen := os.environ.get("WANDB_MODE"):
        return chosen
    import wandb  # takes seconds

    if not wandb.login(prompt=False):  # the run itself has no terminal to ask at
        return "offline"
    server = urlsplit(wandb.setup().settings.base_url)
    port = server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((server.hostname, port), timeout=SECONDS).close()
    except OSError:
        return "offline"
    return "online"
