"""The studies by their names."""

from looplm.studies.compose import ComposeStudy
from looplm.studies.exit_prior import ExitPriorStudy
from looplm.studies.exits import ExitStudy
from looplm.studies.mano import ManoStudy
from looplm.studies.study import Study

STUDIES: dict[str, Study] = {
    study.name: study for study in (ComposeStudy(), ExitPriorStudy(), ExitStudy(), ManoStudy())
}
