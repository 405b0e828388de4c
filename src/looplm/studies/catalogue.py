"""The studies by their names."""

from looplm.studies.addition import AdditionStudy
from looplm.studies.exit_prior import ExitPriorStudy
from looplm.studies.mano import ManoStudy
from looplm.studies.study import Study

STUDIES: dict[str, Study] = {study.name: study for study in (ExitPriorStudy(), ManoStudy(), AdditionStudy())}
