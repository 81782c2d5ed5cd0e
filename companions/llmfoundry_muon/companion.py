"""Muon, an optimizer: Newton and Schulz for the matrices of the blocks, AdamW for the rest."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(builders={"optimizer.name: muon": "llmfoundry_muon.settings:MUON"})
