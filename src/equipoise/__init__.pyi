# The list of what `import equipoise` offers: type checkers read it, and the package itself looks names up in it.
from equipoise import data as data
from equipoise import models as models
from equipoise import testing as testing
from equipoise.core import tree as tree
from equipoise.core.chain import Chain as Chain
from equipoise.core.client import Data as Data
from equipoise.core.client import Env as Env
from equipoise.core.errors import EquipoiseError as EquipoiseError
from equipoise.core.federation import Federation as Federation
from equipoise.core.local import Local as Local
from equipoise.core.method import Method as Method
from equipoise.core.method import helper as helper
from equipoise.core.questions import Question as Question
from equipoise.core.round import one_round as one_round
from equipoise.core.round import start as start
from equipoise.core.server_view import ServerView as ServerView
from equipoise.core.turn import State as State
from equipoise.core.turn import Turn as Turn
from equipoise.data import federate as federate
from equipoise.data import load as load
from equipoise.engines import Serial as Serial
from equipoise.methods import *  # noqa: F403
from equipoise.runs import metrics as metrics
from equipoise.runs import predict as predict
from equipoise.runs.training import fit as fit

__version__: str
