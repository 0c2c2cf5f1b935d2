"""One thin file per trainer. Importing hpo_core imports none of them, and none of them imports another's trainer."""
