"""The symbols of the page in words: shown under facts, and as tooltips of headings of tables."""

SYMBOLS = {
    "‖D‖": "The norm of a task vector D: a fine-tuned model minus the base.",
    "‖D‖ / ‖base‖, %": "How far fine-tuning moved the model, as a share of the base's own norm.",
    "on atoms, %": "The share of a task vector that lies on the atoms: the directions u_i v_iᵀ of the task vectors' "
    "leading singular vectors, on which the paper merges.",
    "α": "The scale: what the merged task vector is multiplied by before it is added to the base.",
    "best α": "The scale at which the method's mean forecast is lowest.",
    "increase": "The forecast increase of the tasks' mean loss, to second order.",
    "V_S": "The variance in the subspace: what the tasks disagree on within the directions that are merged.",
    "R_S": "The residual: what lies outside the directions that are merged, and is lost.",
    "bound": "½(√V_S + √R_S)²: at least the increase of the loss to second order, by the paper's theorem.",
    "η": "How much less the tasks disagree at the mean that curvature gives than at the flat mean.",
    "η / F(x̄)": "η as a share of F(x̄), the disagreement at the flat mean x̄: what curvature can gain.",
    "condition": "The largest eigenvalue of the system that is solved, divided by the smallest; the solution loses "
    "about as many digits as this number has.",
    "KL": "The mean Kullback-Leibler divergence of the merge's predictions from those of each task's own model; 0: "
    "the same.",
    "p, Holm": "p, corrected by Holm's method for the number of comparisons.",
    "p over tasks": "p of a sign-flip test with tasks as its units, instead of samples.",
    "residual": "The relative residual of the equations that were solved for this tensor.",
    "fingerprint": "A hash of names, shapes and samples of every tensor, which tells models apart.",
}
