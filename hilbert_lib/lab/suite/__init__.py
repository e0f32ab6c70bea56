"""Batch runs of the notebooks: parameters, papermill, manifests and reports.

points      notebooks, their parameters, and points: a notebook with values
run         points one after another
folders     where a run lies while it goes on and afterwards
compiling   a first pass over one by several processes, so that kernels are compiled
execute     one notebook by papermill
manifest    what ran, where, with what, and how it ended
report      pages and tables of what lies in the folders
site        the checkout as one site: notebooks as run, documents, evidence, a search
doctor      what this machine and its packages can do
"""
