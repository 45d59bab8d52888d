"""Metrics go online only where that can work, since a run has no terminal to ask at and no time to wait."""

import socket
from types import SimpleNamespace

import pytest

from recipes.errors import UserError
from recipes.wandb_mode import wandb_mode


@pytest.fixture
def wandb_at(monkeypatch):
    """wandb_at(port) -> the mode where wandb's server is at that port of this machine, and an account is known."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def wandb_at(port: int, known: bool = True, refused: str = "") -> str:
        def login(prompt):
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()  # as wandb's own does, to verify the key
            if refused:
                raise wandb.errors.AuthenticationError(refused)
            return known

        settings = SimpleNamespace(base_url=f"http://127.0.0.1:{port}")
        monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=settings))
        monkeypatch.setattr(wandb, "login", login)
        return wandb_mode()

    return wandb_at


def test_online_where_the_server_answers_offline_elsewhere(wandb_at):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert wandb_at(port) == "online"
        assert wandb_at(port, known=False) == "offline"
    assert wandb_at(port) == "offline"


def test_an_account_that_is_refused(wandb_at):
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UserError, match="refuses the account .bad key.*wandb login"):
        wandb_at(server.getsockname()[1], refused="bad key")


def test_what_the_user_has_set_stays(wandb_at, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_at(1) == "disabled"
