"""Batch runs of the notebooks: parameters, papermill, manifests and reports."""
