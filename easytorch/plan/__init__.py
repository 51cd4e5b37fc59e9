"""What a training run takes of each device, from configs alone: `easytorch plan`.

devices.py     accelerators and their memory
shapes.py      configs of well-known models
depth.py       few layers in place of many, and the quantities of all of them
balanced.py    experts to which tokens go evenly
compiled.py    a step compiled for a mesh that is not here
estimate.py    the plan
"""

from easytorch.plan.devices import DEVICES, Device
from easytorch.plan.estimate import Plan, make_plan

__all__ = ["DEVICES", "Device", "Plan", "make_plan"]
