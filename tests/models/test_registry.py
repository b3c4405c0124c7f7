from __future__ import annotations

import pytest

from omni_cluster.models import registry
from omni_cluster.models.family import Family
from omni_cluster.models.registry import family_class, known_families
from omni_cluster.types.errors import ConfigError


@pytest.mark.parametrize("name", known_families())
def test_every_known_family_can_be_had_and_says_its_name(name: str) -> None:
    family = family_class(name)
    assert issubclass(family, Family) and family.name == name


@pytest.mark.parametrize("name", ["llama", "", "omni_cluster.models.qwen2_5_omni.family"])
def test_unknown_family_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match=f"family is '{name}'; use one of qwen2_5_omni"):
        family_class(name)


def test_a_family_whose_package_is_broken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_families", lambda: {"lost": ("no_such_module", "Lost")})
    with pytest.raises(ConfigError, match="family is 'lost', but no_such_module:Lost cannot be had"):
        family_class("lost")
