"""One question: model, canonical form, signature, and the checks against a policy."""

from __future__ import annotations

from chorister.recipe.check import Check, check, verify_recipe, verify_size
from chorister.recipe.model import Aggregators, Arm, Participation, Privacy, Recipe
from chorister.recipe.signature import SignedRecipe, sign, verify
from chorister.recipe.window import Bucket, Window

__all__ = [
    "Aggregators",
    "Arm",
    "Bucket",
    "Check",
    "Participation",
    "Privacy",
    "Recipe",
    "SignedRecipe",
    "Window",
    "check",
    "sign",
    "verify",
    "verify_recipe",
    "verify_size",
]
