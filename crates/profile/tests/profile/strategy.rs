//! How a training is distributed, with figures computed by hand.

use overdrive_profile::{Cluster, Strategy, TrainingSize, choose_strategy};

fn chosen(size: &TrainingSize, cluster: &Cluster) -> Option<Strategy> {
    choose_strategy(size, cluster).unwrap().chosen
}

#[test]
fn the_simplest_that_fits_is_chosen_if_links_are_fast() {
    let cluster = Cluster::new(8, 80e9, 400e9);
    let size =
        |billions: f64| TrainingSize::mixed_precision_adam(billions * 1e9).compute_seconds(2.0).activation_bytes(5e9);
    // 16 bytes per parameter, then 4 + 12/8, 2 + 14/8, 16/8; 67 GB are free besides the activations.
    assert_eq!(chosen(&size(4.0), &cluster), Some(Strategy::DataParallel));
    assert_eq!(chosen(&size(12.0), &cluster), Some(Strategy::Zero1));
    assert_eq!(chosen(&size(17.0), &cluster), Some(Strategy::Zero2));
    assert_eq!(chosen(&size(33.0), &cluster), Some(Strategy::Zero3));
    assert_eq!(chosen(&size(300.0), &cluster), None);
}

#[test]
fn memory_is_that_of_the_zero_paper() {
    // ZeRO, table 1: 7.5 billion parameters on 64 GPUs take 120, 31.4, 16.6 and 1.9 GB.
    let size = TrainingSize::mixed_precision_adam(7.5e9);
    let choice = choose_strategy(&size, &Cluster::new(64, 80e9, 100e9)).unwrap();
    let gigabytes = |strategy| {
        let found = choice.candidates.iter().find(|it| it.strategy == strategy).unwrap();
        (found.gpu_bytes / 1e8).round() / 10.0
    };
    let stages = [Strategy::DataParallel, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];
    assert_eq!(stages.map(gigabytes), [120.0, 31.4, 16.6, 1.9]);
}

#[test]
fn one_gpu_offloads_and_slow_links_use_a_pipeline() {
    let one = Cluster::new(1, 80e9, 1e9);
    assert_eq!(chosen(&TrainingSize::mixed_precision_adam(4e9), &one), Some(Strategy::Single));
    assert_eq!(chosen(&TrainingSize::mixed_precision_adam(8e9), &one), Some(Strategy::ZeroOffload));
    let slow = Cluster::new(4, 80e9, 1e8);
    let size = TrainingSize::mixed_precision_adam(8e9).layers(32).boundary_bytes(1e6);
    assert_eq!(chosen(&size, &slow), Some(Strategy::Pipeline));
}

#[test]
fn the_text_shows_the_arithmetic_and_bad_figures_are_refused() {
    let text = choose_strategy(&TrainingSize::float32_adam(1e9), &Cluster::new(2, 80e9, 1e10)).unwrap().to_string();
    for part in ["1.00 billion", "16.0", "2 (N-1)/N gradients", "recommended: data parallel", "a model"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    for (parameters, gpus, named) in [(f64::NAN, 8, "parameters"), (-1.0, 8, "parameters"), (1e9, 0, "gpus")] {
        let size = TrainingSize::mixed_precision_adam(parameters);
        let error = choose_strategy(&size, &Cluster::new(gpus, 80e9, 1e9)).unwrap_err().to_string();
        assert!(error.starts_with(named), "{error}");
    }
}
