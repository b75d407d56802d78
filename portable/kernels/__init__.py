"""Kernels: optimised implementations of single ops, used only where the ledger holds evidence that they are needed.

registry.py knows them, ledger.py stores what was measured, select.py decides, ``<op>/<provider>.py`` holds the kernels.
"""
