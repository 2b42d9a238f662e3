"""The paper's benchmark: CLIP ViT-B/32, B/16 and L/14, fine-tuned on eight image classification tasks."""
