"""``python -m depthgrow`` is the command ``depthgrow``."""

from depthgrow.cli import run

run()
