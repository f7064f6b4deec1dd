"""SFT data: rows of a data set → conversations → tokens and masks → documents in a global order → packed rows.

`loader.SFTLoader` is what the SFT loop uses; the other files are its stations in that order (`source`, `rows`,
`tokens`, `fetch`, `order`, `documents`, `pack`).
"""
