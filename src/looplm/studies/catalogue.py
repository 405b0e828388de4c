"""The studies by their names."""

from looplm.studies.addition import AdditionStudy
from looplm.studies.capo import CapoStudy
from looplm.studies.compose import ComposeStudy
from looplm.studies.exit_prior import ExitPriorStudy
from looplm.studies.exits import ExitStudy
from looplm.studies.kv import KVStudy
from looplm.studies.mano import ManoStudy
from looplm.studies.multi_hop import MultiHopStudy
from looplm.studies.reachability import ReachabilityStudy
from looplm.studies.recurrence import RecurrenceStudy
from looplm.studies.rltt import RLTTStudy
from looplm.studies.scaling import ScalingStudy
from looplm.studies.study import Study

_ALL: tuple[Study, ...] = (
    AdditionStudy(),
    CapoStudy(),
    ComposeStudy(),
    ExitPriorStudy(),
    ExitStudy(),
    KVStudy(),
    ManoStudy(),
    MultiHopStudy(),
    ReachabilityStudy(),
    RecurrenceStudy(),
    RLTTStudy(),
    ScalingStudy(),
)
STUDIES: dict[str, Study] = {study.name: study for study in _ALL}
