"""What a variant and a plan contribute to the templates of ``templates/cuda``, by what it is about.

Each module makes one frozen dataclass, which templates read by name: ``spec.weights``, ``mask.lists``,
``operands.ragged``, ``forward.mapped``, ``backward.persistent``, ``gradients.keys``. ``emit.py`` puts them together.
"""
