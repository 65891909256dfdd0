"""Bench of a served model: a sweep over concurrency and methods, with one HTML report that opens offline."""

from dflash_deploy.bench.load import Sample, Sweep, measure, percentile
from dflash_deploy.bench.report import as_dict, html
from dflash_deploy.bench.sglang import sglang_bench

__all__ = ["Sample", "Sweep", "as_dict", "html", "measure", "percentile", "sglang_bench"]
