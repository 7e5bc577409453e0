"""The families that the recipe trains."""

from families.common import TinyModel
from families.huginn import Huginn
from families.nanbeige import Nanbeige
from families.ouro import Ouro

FAMILIES: dict[str, type[TinyModel]] = {model.family: model for model in (Ouro, Nanbeige, Huginn)}
