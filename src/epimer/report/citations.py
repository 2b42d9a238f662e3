"""Where the methods come from; the registry says the same, but it needs torch (a test compares the two)."""

CITATIONS = {
    "average": "Wortsman et al., Model soups, ICML 2022",
    "task_arithmetic": "Ilharco et al., Editing Models with Task Arithmetic, ICLR 2023",
    "nan": "Si et al., NAN: A Training-Free Solution to Coefficient Estimation in Model Merging, 2025",
    "greedy_soup": "Wortsman et al., Model soups, ICML 2022",
    "ties": "Yadav et al., TIES-Merging, NeurIPS 2023",
    "dare": "Yu et al., Language Models are Super Mario (DARE), ICML 2024",
    "gradient_matching": "Daheim et al., Model Merging by Uncertainty-Based Gradient Matching, ICLR 2024",
    "tsv": "Gargiulo et al., Task Singular Vectors, CVPR 2025",
    "iso_c": "Marczak et al., No Task Left Behind: Isotropic Model Merging, ICML 2025",
    "iso_cts": "Marczak et al., No Task Left Behind: Isotropic Model Merging, ICML 2025",
    "fisher": "Matena and Raffel, Merging Models with Fisher-Weighted Averaging, NeurIPS 2022",
    "regmean": "Jin et al., Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023",
    "mats": "Tam et al., Merging by Matching Models in Task Parameter Subspaces, TMLR 2024",
    "wudi": "Cheng et al., Whoever Started the Interference Should End It (WUDI), ICML 2025",
    "epimer": "Lu et al., Model Merging on Loss Landscape: A Geometry Perspective, CVPR 2026 Findings, "
    "arXiv:2605.26693",
    "epimer_kron": "this project; after Lu et al., CVPR 2026 Findings",
    "epimer_full": "this project; after Lu et al., CVPR 2026 Findings",
    "epimer_exact": "this project; after Lu et al., CVPR 2026 Findings",
    "epimer_free": "this project; after Lu et al., CVPR 2026 Findings",
}
