"""The Triton backend of hpo_core: the functions of each op in the file of its name."""
