"""Where the models of a table of parsed lines are: files beside it, named by a digest of their content.

A model is durable before the commit that names it, and never changes, so a table and the model that its last commit
names always agree. A model that no commit names is left over from a batch that was interrupted.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final
from uuid import uuid4

from quiver.errors import DamageError
from quiver.spark.logs import Model
from quiver.spark.pipelines.lake import fsync_path
from quiver.spark.pipelines.place import Place

FOLDER: Final = "_models"


def model_name(data: bytes) -> str:
    """Return the name of a stored model: 63 bits, since a Delta transaction stores a signed 64-bit number."""
    return f"{int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'big') >> 1:016x}"


def save_model(place: Place, data: bytes) -> str:
    """Store a model durably; return its name."""
    name = model_name(data)
    path, filesystem = place.locate(_path(name))
    if filesystem is not None:  # the store has the whole object, or none
        with filesystem.open_output_stream(path) as stream:
            stream.write(data)
        return name
    if os.path.exists(path):
        return name
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.{uuid4().hex}"
    with open(draft, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    fsync_path(os.path.dirname(path))
    return name


def load_model(place: Place, name: str) -> Model:
    """Load a stored model; an empty name is the model that has learned nothing.

    Raises:
        DamageError: the file is missing, or is not what was stored.
    """
    if not name:
        return Model()
    path, filesystem = place.locate(_path(name))
    try:
        if filesystem is not None:
            with filesystem.open_input_file(path) as stream:
                data = stream.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
    except OSError as error:
        raise DamageError(f"the model {_path(name)} of {place} cannot be read: {error}") from None
    if model_name(data) != name:
        raise DamageError(f"the model {_path(name)} of {place} is damaged: restore it, or parse into another place")
    return Model.from_bytes(data)


def _path(name: str) -> str:
    return f"{FOLDER}/{name}.model"
