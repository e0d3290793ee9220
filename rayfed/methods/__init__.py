"""Federated methods: the contract of a part, the parts, and the recipes of papers' methods.

Every part and recipe is here by its name; `registry.py` finds the parts in this package's modules.
"""

from typing import TYPE_CHECKING, Any

from rayfed.base.errors import spelled
from rayfed.methods.composition import compose as compose
from rayfed.methods.part import Method as Method, Part as Part, Parts as Parts, switch as switch
from rayfed.methods.recipes import *  # noqa: F403
from rayfed.methods.requirements import require_features as require_features
from rayfed.methods.requirements import require_sgd as require_sgd
from rayfed.methods.requirements import warn_of_momentum as warn_of_momentum
from rayfed.methods.registry import PARTS as PARTS, RECIPES as RECIPES
from rayfed.methods.registry import read_method as read_method, write_method as write_method
from rayfed.methods.views import Batch as Batch, ClientView as ClientView, Fit as Fit
from rayfed.methods.views import ServerView as ServerView, Step as Step

globals().update({part.__name__: part for part in PARTS.values()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Tell type checkers that there are more names: they cannot see the parts."""
else:

    def __getattr__(name):
        """Raise an error, which names the method that was meant."""
        meant = spelled(name, RECIPES)
        if meant in RECIPES:
            # Python would replace the text of an AttributeError.
            raise ImportError(
                f"no name '{name}' in rayfed.methods; methods are functions in small letters: "
                f"{meant}"
            )
        raise AttributeError(f"module 'rayfed.methods' has no attribute '{name}'")
