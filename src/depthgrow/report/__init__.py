"""The report of a study, from its files alone; nothing here imports torch."""

import importlib
import os

# A notebook names its own backend in MPLBACKEND; where that cannot be loaded, importing matplotlib fails. Pictures here are
# written to files and need no backend.
_named = os.environ.pop("MPLBACKEND", None)
importlib.import_module("matplotlib")
if _named is not None:
    os.environ["MPLBACKEND"] = _named
