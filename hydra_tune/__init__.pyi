from hydra_tune.errors import HydraTuneError as HydraTuneError
from hydra_tune.errors import TrialsFailed as TrialsFailed
from hydra_tune.executor import HydraExecutor as HydraExecutor
from hydra_tune.loop_task import LoopTask as LoopTask
from hydra_tune.pool.job import EventStream as EventStream
from hydra_tune.pool.job import Failed as Failed
from hydra_tune.pool.job import Finished as Finished
from hydra_tune.pool.job import Job as Job
from hydra_tune.pool.job import Reported as Reported
from hydra_tune.pool.job import Result as Result
from hydra_tune.shapes_only import ShapesOnly as ShapesOnly
from hydra_tune.task import TrainTask as TrainTask
from hydra_tune.train.checkpoint.weights import load_module as load_module
from hydra_tune.train.loop.reference_loop import train_plain as train_plain
from hydra_tune.train.own_loop.handle import Loop as Loop
from hydra_tune.train.shared_module import SharedModule as SharedModule

__version__: str
