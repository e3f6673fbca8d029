"""The private parts of Zarr that distmm uses are there; without them products still run.

If a test here fails with a new Zarr, compare `distmm/storage/zarr_internals.py` with that version first.
"""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import GzipCodec, ShardingCodec
from zarr.storage import LocalStore, LoggingStore, MemoryStore

from distmm.storage import open_matrix, zarr_internals
from tests.distmm.storage.samples import sample


def test_zarr_has_the_parts_that_are_used() -> None:
    assert list(inspect.signature(zarr.AsyncArray.__init__).parameters) == ["self", "metadata", "store_path", "config"]
    assert {"_decode_single", "compute_encoded_size"} <= set(dir(BytesBytesCodec))
    assert {"codecs", "index_codecs"} <= set(ShardingCodec.__dataclass_fields__)
    assert {"get", "get_sync"} <= set(dir(LocalStore))
    assert zarr_internals.NO_TYPES == ""
    declared = {name for kind in zarr_internals.BaseFloat.__mro__ for name in inspect.get_annotations(kind)}
    assert {"dtype_cls", "_zarr_v3_name", "endianness"} <= declared
    memory = MemoryStore()
    array = zarr.create_array(LoggingStore(memory), shape=(2,), dtype="f4")
    assert zarr_internals.store_of(array) is memory
    assert zarr_internals.dictionary_of(memory.with_read_only()) is zarr_internals.dictionary_of(memory) is not memory


def test_a_zarr_that_has_moved_the_class_of_an_error_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (zarr.errors, zarr.core.dtype):
        for name in ("__getattr__", "DataTypeValidationError"):
            monkeypatch.delattr(module, name, raising=False)
    spec = importlib.util.spec_from_file_location("imported_again", zarr_internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    assert "DataTypeValidationError" in again.NO_TYPES
    with pytest.warns(RuntimeWarning, match="bfloat16 arrays can be neither read nor written"):
        again.register_bfloat16()


@pytest.mark.parametrize("version", [2, 3])
def test_every_packing_codec_of_an_array_is_bounded(version: int, tmp_path: Path) -> None:
    options = {"shards": (8, 8)} if version == 3 else {}
    array = zarr.create_array(
        tmp_path / "A.zarr", shape=(8, 8), chunks=(4, 4), dtype="f8", zarr_format=version, **options
    )
    described = repr(zarr_internals.bounded(array, bool).metadata)
    assert "Bounded" in described


def test_a_changed_zarr_is_warned_of_and_arrays_are_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = sample()
    zarr.create_array(tmp_path / "A.zarr", data=values, chunks=(4, 4), compressors=GzipCodec())
    monkeypatch.delattr(zarr, "AsyncArray")
    with pytest.warns(
        RuntimeWarning, match=r"Zarr .* differs from the versions that distmm supports .*without a bound on memory"
    ):
        np.testing.assert_array_equal(open_matrix(tmp_path / "A.zarr")[...], values)
    monkeypatch.setattr(zarr_internals, "NO_TYPES", "no module named x")
    with pytest.warns(RuntimeWarning, match="bfloat16 arrays can be neither read nor written"):
        zarr_internals.register_bfloat16()


def test_bfloat16_arrays_travel_to_workers(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "A.zarr", shape=(4, 4), dtype=np.dtype(ml_dtypes.bfloat16))
    travelled = pickle.loads(pickle.dumps(zarr.open(tmp_path / "A.zarr")))
    assert travelled.dtype == ml_dtypes.bfloat16


def test_no_other_module_uses_private_parts_of_zarr() -> None:
    private = re.compile(r"zarr\.core|AsyncArray|async_array|store_path|encode_chunk_key|\bzarr\.\w*\._")
    package = Path(zarr_internals.__file__).parents[1]
    users = {path.name for path in package.rglob("*.py") if private.search(path.read_text())}
    assert users == {"zarr_internals.py"}
