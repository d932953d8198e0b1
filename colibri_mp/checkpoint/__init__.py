"""Where every tensor and every expert of a published checkpoint lies, and what is wrong with it if anything is.

    safetensors_header   the header of one file -> `TensorInfo` of each tensor
    source               a folder -> `Checkpoint`: config, all headers, fingerprint; reads bytes on demand
    quantisation         config.json's quantisation settings -> the parameters of each module
    matrices             module path -> `StoredMatrix` (shape, encoding, pieces in the files)
    experts              one layer's experts, in any of the published layouts -> `ExpertLayer` (offset tables)
    hub                  what the user typed after --model -> a folder

Only headers are read when a checkpoint is opened. Nothing here imports the kernels.
"""

from colibri_mp.checkpoint.experts import ExpertLayer
from colibri_mp.checkpoint.matrices import Piece, StoredMatrix
from colibri_mp.checkpoint.safetensors_header import TensorInfo
from colibri_mp.checkpoint.source import Checkpoint

__all__ = ["Checkpoint", "ExpertLayer", "Piece", "StoredMatrix", "TensorInfo"]
