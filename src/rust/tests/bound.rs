//! The certified bound against reference values computed with 40 digits, and its limits.

use _native::bound::counts::Count;
use _native::bound::exact::Setting;
use _native::bound::renyi;
use _native::bound::{Chances, MAX_COHORT, MAX_WORK};
use _native::error::Error;

type Outcome = Result<(), Error>;

fn close(found: f64, wanted: f64, relative: f64) {
    assert!((found - wanted).abs() <= relative * wanted.abs(), "{found} is not {wanted}");
}

/// As `chorister.privacy.randomizers` computes them, to within a rounding.
fn chances(symmetric: bool, local: f64) -> Chances {
    let (q, not_q) = (1.0 / (local.exp() + 1.0), 1.0 / ((-local).exp() + 1.0));
    let half = (local / 2.0).tanh();
    if symmetric {
        Chances { q, not_q, h: not_q, not_h: q, gap: half, replacement: 2.0 * local }
    } else {
        Chances { q, not_q, h: 0.5, not_h: 0.5, gap: half / 2.0, replacement: local }
    }
}

#[test]
fn compositions_match_reference_values() -> Outcome {
    let reference = [
        (10, 1.0, false, 0, 0, 0.3, 0.0125082038990432),
        (10, 1.0, false, 3, 2, 0.3, 0.0105171800821448),
        (100, 3.0, false, 0, 0, 0.5, 0.00759369605047727),
        (1000, 3.0, false, 0, 0, 0.3, 2.44085658948803e-5),
        (1000, 3.0, false, 10, 5, 0.3, 1.99167546450122e-5),
        (1000, 6.0, false, 0, 0, 1.5, 1.15013240990679e-5),
        (1000, 3.0, true, 999, 0, 0.9, 1.85944577619919e-6),
        (1000, 1.0, true, 999, 0, 0.15, 1.1912777186225e-5),
    ];
    for (cohort, local, symmetric, held, instead, epsilon, delta) in reference {
        let setting = Setting::new(cohort, chances(symmetric, local), false)?;
        close(setting.composition_delta(held, instead, epsilon)?, delta, 1e-12);
    }
    Ok(())
}

#[test]
fn epsilons_match_reference_values_and_keep_their_order() -> Outcome {
    // eps0, n, symmetric, delta, witness, certified at most
    let reference = [
        (3.0, 1000, false, 1e-6, 0.376195, 0.376212),
        (3.0, 1_000_000, false, 1e-6, 0.009157, 0.009158),
        (6.0, 100_000, false, 1e-6, 0.168261, 0.168264),
        (3.0, 10_000, true, 1e-6, 0.240967, 0.241060),
        (3.0, 1_000_000, false, 1e-12, 0.017709, 0.017710),
    ];
    for (local, cohort, symmetric, delta, witness, most) in reference {
        let found = Setting::new(cohort, chances(symmetric, local), false)?.epsilon(delta)?;
        close(found.lower, witness, 3e-5);
        assert!(found.lower <= found.upper && found.upper <= most + 6e-7, "{found:?}");
        let back = Setting::new(cohort, chances(symmetric, local), false)?.delta(found.upper)?;
        assert!(back.lower <= delta && back.upper <= delta * 1.02, "{back:?}");
    }
    Ok(())
}

/// Bin(a, q) + Bin(b, h) by adding one user after the other.
fn direct(a: usize, b: usize, chances: Chances) -> Vec<f64> {
    let users = std::iter::repeat_n((chances.q, chances.not_q), a)
        .chain(std::iter::repeat_n((chances.h, chances.not_h), b));
    users.fold(vec![1.0], |law, (one, zero)| {
        let below = std::iter::once(&0.0).chain(&law);
        let here = law.iter().chain([&0.0]);
        here.zip(below).map(|(here, below)| here * zero + below * one).collect()
    })
}

#[test]
fn the_recurrence_gives_the_law_of_two_binomials() -> Outcome {
    for symmetric in [false, true] {
        for local in [0.001, 0.7, 4.0, 14.0, 20.0] {
            let chances = chances(symmetric, local);
            for (a, b) in
                [(0, 0), (1, 0), (0, 7), (3, 4), (1, 1), (200, 3), (2, 150), (90, 110), (1, 900)]
            {
                let count = Count { references: a, holders: b, chances };
                let law = count.law(1e-30)?;
                let wanted = direct(a as usize, b as usize, chances);
                assert!(law.error < 1e-11);
                for (mass, wanted) in law.mass.iter().zip(wanted.iter().skip(law.first as usize)) {
                    if *wanted > 1e-200 {
                        close(*mass, *wanted, 1e-12);
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn renyi_divergences_match_direct_sums() -> Outcome {
    for (symmetric, local, n, order) in
        [(false, 3.0, 12, 10), (true, 1.0, 6, 60), (false, 12.0, 20, 32), (true, 4.0, 25, 3)]
    {
        let chances = chances(symmetric, local);
        let law = |one: f64, zero: f64| {
            let z = direct(n - 1, 0, chances);
            let below: Vec<f64> = std::iter::once(0.0).chain(z.iter().copied()).collect();
            z.iter().chain([&0.0]).zip(below).map(|(h, b)| h * zero + b * one).collect::<Vec<_>>()
        };
        let (a, b) = (law(chances.h, chances.not_h), law(chances.q, chances.not_q));
        let side = |p: &[f64], q: &[f64]| {
            let terms = p.iter().zip(q).map(|(p, q)| q * (p / q).powi(order));
            terms.sum::<f64>().ln() / f64::from(order - 1)
        };
        let wanted = side(&a, &b) + side(&b, &a);
        let found = renyi::divergence(n as u64, chances, order as u32, true)?;
        assert!(wanted <= found && found <= wanted + 1e-8, "{found} is not {wanted}");
    }
    Ok(())
}

#[test]
fn nonsense_is_refused_and_nothing_panics() {
    for bad in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e300] {
        assert!(matches!(
            Setting::new(10, chances(false, bad), false),
            Err(Error::InvalidInput(_))
        ));
        for noised in [false, true] {
            let setting = Setting::new(10, chances(true, 3.0), noised).ok();
            let found = setting.map(|setting| setting.epsilon(bad));
            assert!(matches!(found, Some(Err(Error::InvalidInput(_)))), "{bad}");
        }
        assert!(matches!(
            renyi::divergence(10, chances(true, bad), 4, true),
            Err(Error::InvalidInput(_))
        ));
    }
    assert!(matches!(Setting::new(0, chances(false, 3.0), false), Err(Error::InvalidInput(_))));
    assert!(matches!(
        Setting::new(MAX_COHORT + 1, chances(false, 3.0), false),
        Err(Error::InvalidInput(_))
    ));
    assert!(matches!(
        renyi::divergence(10, chances(true, 3.0), 1, true),
        Err(Error::InvalidInput(_))
    ));
}

/// At some ten nanoseconds an entry: a second.
const _: () = assert!(MAX_WORK < 110_000_000);
