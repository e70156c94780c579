"""The datasets of the experiments, in their official formats: found in a folder, checked, downloaded where asked."""
