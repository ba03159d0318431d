"""Files of strangers that are not what their names say."""

from pathlib import Path

import pytest

from isobit.data.foreign import BadJson, check_readable, exists, parse_json, read_bytes
from isobit.data.readers import Source, read_rows
from isobit.errors import IsobitError

LFS = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\n"
    "size 12345\n"
)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.json"])
def test_data_that_are_pointers_or_links_to_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(LFS)
    with pytest.raises(
        IsobitError, match=r"rows\.\w+: a pointer of Git LFS, not the file itself; `git lfs pull`"
    ):
        list(read_rows(Source(path)))
    path.unlink()
    path.symlink_to("gone")
    with pytest.raises(IsobitError, match=r"rows\.\w+: a link to gone, which is not there$"):
        list(read_rows(Source(path)))


def test_a_folder_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("elsewhere")
    with pytest.raises(IsobitError, match=r"data: a link to elsewhere, which is not there$"):
        exists(tmp_path / "data" / "rows.jsonl")
    assert not exists(tmp_path / "nothing" / "rows.jsonl")  # the control


def test_files_that_only_begin_alike_are_read(tmp_path: Path) -> None:
    for text in ("version 1", LFS + "x" * 1024, "", "/annex"):
        (tmp_path / "file").write_text(text)
        assert check_readable(tmp_path / "file") == len(text)
        assert read_bytes(tmp_path / "file", 1 << 20) == text.encode()


NINES = "9" * 290
MANY = "[" + "1," * (1 << 15) + "{}]"


@pytest.mark.parametrize(
    "number",
    ["NaN", "Infinity", "-Infinity", "1e999", "-1E+400", f"{NINES}e20", "9" * 310 + ".5", "1e+309"],
)
@pytest.mark.parametrize("text", ["{}", "[1, {}]", '{{"a": [[{}]]}}', MANY])
def test_numbers_that_are_not_finite(number: str, text: str) -> None:
    """Refused where a caller asks for finite ones, in texts of many values too; read elsewhere."""
    with pytest.raises(BadJson, match=r"is no finite number|a whole number of"):
        parse_json(text.format(number), patient=True, finite=True)
    parse_json(text.format(number))


@pytest.mark.parametrize(
    "number",
    ["1e308", "-1.7976931348623157e308", "1E+9", "0e999", "1e-999", "9" * 300, f"{NINES}e9"],
)
def test_large_finite_numbers_have_their_bits(number: str) -> None:
    for text in (number, MANY.format(number)):
        assert parse_json(text, patient=True, finite=True) == parse_json(text)
