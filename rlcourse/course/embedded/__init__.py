"""How the small model that ships in `data/minigsm/model/` was made."""
