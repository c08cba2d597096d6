"""Settings: where values come from, what is refused, and what is said then."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.cli.config import render_reference
from quiver.config import LogSettings, Settings, all_settings, load_settings
from quiver.errors import ConfigError

REFERENCE_PAGE = Path(__file__).parents[2] / "docs" / "operations" / "configuration.md"


def test_defaults_need_nothing() -> None:
    assert load_settings() == Settings()


def test_defaults_are_durable() -> None:
    assert Settings().log.durability == "fsync"


def test_toml_beats_default() -> None:
    settings = load_settings('[log]\ndurability = "none"\nsegment_bytes_max = 4096')
    assert settings.log == LogSettings(durability="none", segment_bytes_max=4096)


def test_environment_beats_toml() -> None:
    environment = {"QUIVER_LOG__SEGMENT_BYTES_MAX": "8192", "PATH": "/bin"}
    assert load_settings("[log]\nsegment_bytes_max = 4096", environment=environment).log.segment_bytes_max == 8192


def test_flag_beats_environment() -> None:
    environment = {"QUIVER_LOG__SEGMENT_BYTES_MAX": "8192"}
    settings = load_settings(environment=environment, flags={"log.segment_bytes_max": "16384"})
    assert settings.log.segment_bytes_max == 16384


def test_sources_mix_within_a_section() -> None:
    settings = load_settings(
        "[log]\nflush_interval_ms = 7",
        environment={"QUIVER_LOG__DURABILITY": "interval"},
        flags={"log.index_interval_bytes": "128", "logging.level": "debug"},
    )
    assert (settings.log.flush_interval_ms, settings.log.durability) == (7, "interval")
    assert (settings.log.index_interval_bytes, settings.logging.level) == (128, "debug")


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("[log]\nsegment_byte_max = 1", "segment_byte_max"),
        ("[lgo]\n", "lgo"),
        ("[log]\nsegment_bytes_max = 1", "log.segment_bytes_max"),
        ("[log]\nsegment_bytes_max = 99999999999", "log.segment_bytes_max"),
        ('[log]\nsegment_bytes_max = "much"', "log.segment_bytes_max"),
        ('[log]\ndurability = "maybe"', "log.durability"),
        ("log = 3", "log"),
        ("[log\n", "not valid TOML"),
    ],
)
def test_bad_file_is_refused_and_the_key_named(toml: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(toml)
    assert named in str(refused.value)


@pytest.mark.parametrize("variable", ["QUIVER_LOG__NOTHING", "QUIVER_LOG", "QUIVER_", "QUIVER_LOG_DURABILITY"])
def test_unknown_environment_variable_is_refused_and_named(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable {variable}: unknown setting"):
        load_settings(environment={variable: "1"})


def test_bad_environment_value_is_refused_and_the_key_named() -> None:
    with pytest.raises(ConfigError, match=r"log\.flush_interval_ms"):
        load_settings(environment={"QUIVER_LOG__FLUSH_INTERVAL_MS": "soon"})


def test_unknown_flag_is_refused_and_named() -> None:
    with pytest.raises(ConfigError, match=r"flag for log\.nothing: unknown setting"):
        load_settings(flags={"log.nothing": "1"})


def test_section_that_is_no_table_is_refused_when_a_flag_wants_to_go_into_it() -> None:
    with pytest.raises(ConfigError, match=r"\[log\] must be a table"):
        load_settings("log = 3", flags={"log.durability": "none"})


def test_every_setting_says_what_it_is_and_what_is_allowed() -> None:
    for setting in all_settings():
        assert setting.description.endswith("."), setting.key
        is_bounded = setting.choices or setting.at_least is not None
        assert is_bounded or isinstance(setting.default, bool | str), setting.key


def test_setting_has_one_name_in_each_place() -> None:
    setting = next(setting for setting in all_settings() if setting.name == "segment_bytes_max")
    assert setting.key == "log.segment_bytes_max"
    assert setting.environment_variable == "QUIVER_LOG__SEGMENT_BYTES_MAX"
    assert setting.flag == "--log-segment-bytes-max"


def test_every_default_is_accepted_when_it_is_given() -> None:
    for setting in all_settings():
        assert load_settings(environment={setting.environment_variable: str(setting.default)}) == Settings()


def test_reference_page_is_what_the_declaration_makes_it() -> None:
    assert REFERENCE_PAGE.read_text() == render_reference(), "run `make docs`"


def test_node_that_is_alone_is_its_own_manager() -> None:
    assert load_settings(flags={"node.id": "7", "node.wire": "10.0.0.7:9002"}).node.managers == {7: "10.0.0.7:9002"}


def test_managers_are_told_by_id_and_address() -> None:
    node = load_settings('[node]\nid = 2\njoin = "1@a:9002, 2@[::1]:9003"').node
    assert node.managers == {1: "a:9002", 2: "[::1]:9003"}


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ('roles = "manager,cook"', "node.roles"),
        ('roles = " "', "node.roles"),
        ('wire = "9002"', "node.wire"),
        ('http = "host:99999"', "node.http"),
        ('join = "1@host"', "node.join"),
        ('join = "a@host:1"', "node.join"),
        ('join = "1@host:1,1@host:2"', "node.join"),
        ('id = 2\nroles = "broker"', "node.join is empty"),
        ('id = 1\nroles = "broker"\njoin = "1@host:1"', "node.join lists node 1"),
    ],
)
def test_bad_node_is_refused_and_the_key_named(toml: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings("[node]\n" + toml)
    assert named in str(refused.value)


@pytest.mark.parametrize("host", ["[::1]", "host:9002", "[::1]:9002", "a]b", "::1::2"])
def test_advertised_host_that_no_node_could_dial_is_refused(host: str) -> None:
    """It would reach every node of the cluster through the metadata."""
    with pytest.raises(ConfigError, match=r"node\.advertise is .* without port and brackets"):
        load_settings(f'[node]\nadvertise = "{host}"')


@pytest.mark.parametrize("host", ["::1", "fe80::2", "broker-1", "10.0.0.7", "a.example"])
def test_advertised_host_is_a_name_or_an_address(host: str) -> None:
    assert load_settings(f'[node]\nadvertise = "{host}"').node.advertise == host
