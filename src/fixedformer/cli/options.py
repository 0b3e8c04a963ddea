"""Types of options that several commands share, checked where the command line is parsed."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

Seed = Annotated[int, Parameter(validator=Number(gte=0, lt=2**63))]
Count = Annotated[int, Parameter(validator=Number(gte=1))]
