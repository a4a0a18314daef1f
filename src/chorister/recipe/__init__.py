"""One question: its model, canonical form and signature, and the checks against a policy."""

from __future__ import annotations

from chorister.recipe.check import Check, check, refusal, verify_recipe, verify_size
from chorister.recipe.model import (
    Aggregators,
    Arm,
    Bucket,
    Participation,
    Privacy,
    Recipe,
    Series,
    Window,
)
from chorister.recipe.signature import SignedRecipe, sign, verify

__all__ = [
    "Aggregators",
    "Arm",
    "Bucket",
    "Check",
    "Participation",
    "Privacy",
    "Recipe",
    "Series",
    "SignedRecipe",
    "Window",
    "check",
    "refusal",
    "sign",
    "verify",
    "verify_recipe",
    "verify_size",
]
