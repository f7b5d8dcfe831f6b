"""Stands in for meson-python while pip downloads barkeep's source package (scripts/bootstrap): names the package,
builds nothing."""
import pathlib


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    name = "barkeep-0.1.6.dist-info"
    path = pathlib.Path(directory, name)
    path.mkdir()
    path.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: barkeep\nVersion: 0.1.6\n")
    return name
