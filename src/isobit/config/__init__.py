"""The configuration of a run: strict YAML into frozen values. Relative paths are taken from the
current directory."""

from isobit.config.architecture import ArchitectureConfig
from isobit.config.load import (
    dump_config,
    is_supervised,
    load_any_run_config,
    load_compare_config,
    load_config,
    load_run_config,
    load_sft_config,
    load_train_or_sft_config,
    parse_config,
)
from isobit.config.resuming import RESUMABLE, check_resumed, repeated
from isobit.config.schema import CompareConfig, Config, SftConfig
from isobit.config.sections import SamplingConfig

__all__ = [
    "RESUMABLE",
    "ArchitectureConfig",
    "CompareConfig",
    "Config",
    "SamplingConfig",
    "SftConfig",
    "check_resumed",
    "dump_config",
    "is_supervised",
    "load_any_run_config",
    "load_compare_config",
    "load_config",
    "load_run_config",
    "load_sft_config",
    "load_train_or_sft_config",
    "parse_config",
    "repeated",
]
