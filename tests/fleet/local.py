"""Local deployments that tests share."""

from __future__ import annotations

from pathlib import Path

from chorister.fleet.deployment import Deployment
from chorister.fleet.deployment_files import SampleTerms

TERMS = SampleTerms(
    reports=1, epsilon="2", device_epsilon="2", device_reports=1, longest_window="2m"
)


def create(folder: Path, *, devices: int | None = None) -> Deployment:
    return Deployment.create(folder, TERMS, devices=devices)
