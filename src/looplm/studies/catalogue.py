"""The studies by their names."""

from looplm.studies.capo import CapoStudy
from looplm.studies.exit_prior import ExitPriorStudy
from looplm.studies.mano import ManoStudy
from looplm.studies.multi_hop import MultiHopStudy
from looplm.studies.study import Study

STUDIES: dict[str, Study] = {
    study.name: study for study in (ExitPriorStudy(), ManoStudy(), CapoStudy(), MultiHopStudy())
}
