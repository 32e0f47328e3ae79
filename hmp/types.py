"""The classes of what public functions return, for annotations and `isinstance()`. Nobody constructs them."""

from .core.convert import Handle as Handle
from .tools.benchmark import Benchmark as Benchmark
from .tools.cast_weights import CastWeights as CastWeights
from .tools.compare.comparison import Comparison as Comparison
from .tools.compare.comparison import MoveTrial as MoveTrial
from .tools.compare.comparison import TokenDistance as TokenDistance
from .tools.explain import Rule as Rule
from .tools.nonfinite.finding import Finding as Finding
from .tools.record.report import Report as Report
from .tools.record.rows import Row as Row
from .tools.record.rows import Violation as Violation
from .tools.summary import Summary as Summary
from .tools.traces.compare import CaptureComparison as CaptureComparison
from .tools.traces.compare import Gap as Gap
from .tools.traces.file import Capture as Capture
from .tools.tune.result import Trial as Trial
from .tools.tune.result import TuneResult as TuneResult
from .tools.unreachable import Unreachable as Unreachable
