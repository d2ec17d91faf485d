//! Option spellings, recorded names, byte counts and refusals.

use perplexity_kv::attention::{EightBitPv, KernelOptions};
use perplexity_kv::registry::{KvDtype, KvError, KvPair, accepted_names, find, variants};

#[test]
fn bytes_per_token_and_head_are_those_of_the_formats() {
    let cases = [
        ("bf16", 1024.0),
        ("int8", 528.0),
        ("fp8", 516.0),
        ("k8v4", 402.0),
        ("nvfp4", 288.0),
        ("k4v2", 196.0),
        ("vq2", 132.0),
        ("rk8v4@a", 400.0),
        ("rk8v4@b", 408.0),
        ("rk4v4@a", 272.0),
        ("rk4v4@b", 280.0),
        ("rk4v4-e8@a", 272.0),
        ("rk4v4-e8@b", 280.0),
        ("rk2v4-e8@a", 208.0),
        ("rk2v4-e8@a2", 208.0),
        ("rk2v4-e8@b", 216.0),
        ("rk6v4-e8", 344.0),
    ];
    for (name, bytes) in cases {
        let pair: KvPair = name.parse().unwrap();
        assert_eq!(pair.bytes_per_token_and_head(256), bytes, "{name}");
    }
    // 16 attention layers of 4 KV heads: the byte counts published for the 27B models.
    let layers: Vec<usize> = (0..16).collect();
    for (name, bytes) in [("bf16", 65_536.0), ("k8v4", 25_728.0), ("rk2v4-e8", 13_824.0)] {
        assert_eq!(
            name.parse::<KvDtype>().unwrap().bytes_per_token(&layers, 4, 256),
            bytes,
            "{name}"
        );
    }
}

#[test]
fn recorded_names_are_those_of_the_engines() {
    let cases = [
        ("bf16", "bf16"),
        ("int8", "int8-g64"),
        ("fp8", "fp8-e4m3-r256"),
        ("nvfp4", "nvfp4"),
        ("k8v4", "k8v4"),
        ("vq2", "vq2"),
        ("k4v2", "k4v2"),
        ("rk8v4", "rotated-k8g64-v4g32"),
        ("rk4v4", "rotated-lloyd4g64-v4g32"),
        ("rk4v4-e8", "rotated-k4e8g64-v4g32"),
        ("rk2v4-e8", "rotated-k2e8g64-v4g32"),
    ];
    for (name, recorded) in cases {
        assert_eq!(find(name).unwrap().recorded, recorded);
    }
    assert_eq!(
        find("rk4v4").unwrap().name,
        "rk4v4@b",
        "a bare name is the current lineage"
    );
}

#[test]
fn names_and_recorded_names_are_unique() {
    let mut names: Vec<&str> = variants().map(|variant| variant.name).collect();
    let mut recorded: Vec<&str> = variants().map(|variant| variant.recorded).collect();
    for list in [&mut names, &mut recorded] {
        let count = list.len();
        list.sort_unstable();
        list.dedup();
        assert_eq!(list.len(), count);
    }
}

#[test]
fn keys_and_values_are_chosen_separately() {
    let pair: KvPair = "k=fp8,v=nvfp4".parse().unwrap();
    let fixed: KvPair = "k8v4".parse().unwrap();
    assert_eq!((pair.k, pair.v), (fixed.k, fixed.v));
    assert_eq!(pair.recorded, "k=fp8-e4m3-r256,v=nvfp4");
    assert_eq!("v=nvfp4, k=fp8".parse::<KvPair>().unwrap(), pair);
    assert_eq!("k=int8,v=int8".parse::<KvPair>().unwrap().name, "int8");
}

#[test]
fn layer_tables_name_exceptions_and_survive_a_round_trip() {
    let dtype: KvDtype = "bf16; 3,7-8 = int8; 11=k=fp8,v=rk8v4@a".parse().unwrap();
    assert_eq!(dtype.layer(0).name, "bf16");
    assert_eq!(
        (dtype.layer(3).name.as_str(), dtype.layer(8).name.as_str()),
        ("int8", "int8")
    );
    assert_eq!(dtype.to_string(), "bf16;3=int8;7=int8;8=int8;11=k=fp8,v=rk8v4@a");
    assert_eq!(dtype.to_string().parse::<KvDtype>().unwrap(), dtype);
    assert_eq!(
        dtype.recorded(),
        "bf16;3=int8-g64;7=int8-g64;8=int8-g64;11=k=fp8-e4m3-r256,v=rk8v4@a"
    );
    assert_eq!(dtype.check(&[2, 3, 7, 8, 11], 256), Ok(()));
    let unused = dtype.check(&[3, 7, 8, 11], 256).unwrap_err();
    assert_eq!(unused, KvError::UnusedDefault { codec: "bf16".into() });
    let missing = dtype.check(&[3, 7, 8], 256).unwrap_err();
    assert_eq!(
        missing,
        KvError::NoCache {
            layer: 11,
            attention: vec![3, 7, 8]
        }
    );
    // Bytes: layer 3 in INT8, layer 0 in 16 bits, two heads each.
    assert_eq!(dtype.bytes_per_token(&[0, 3], 2, 256), 2.0 * (1024.0 + 528.0));
}

#[test]
fn wrong_spellings_are_refused_in_words() {
    let refuse = |text: &str| text.parse::<KvDtype>().unwrap_err().to_string();
    for name in ["", "fp16", "rk4v4@d", "int8@"] {
        let message = refuse(name);
        assert!(
            message.contains(&format!("`{name}`")) && message.contains(&accepted_names()),
            "{message}"
        );
    }
    for pair in ["k=int8", "k=int8,k=fp8", "k=int8,fp8", "q=int8,v=fp8"] {
        assert!(refuse(pair).contains("k=NAME,v=NAME"), "{pair}");
    }
    for table in [
        "bf16;int8",
        "bf16;x=int8",
        "bf16;7-3=int8",
        "bf16;+3=int8",
        "bf16;-1=int8",
        "bf16;99999999999=int8",
        "bf16;",
    ] {
        assert!(refuse(table).contains("layer table"), "{table}: {}", refuse(table));
    }
    assert_eq!(
        refuse("bf16;3=int8;2-4=fp8"),
        "layer 3 appears twice in the KV layer table"
    );
    assert!(refuse("bf16;3=int9").contains("unknown KV codec `int9`"));
}

#[test]
fn head_dims_outside_a_format_are_refused_before_any_work() {
    let error = "int8".parse::<KvDtype>().unwrap().check(&[3], 128).unwrap_err();
    assert_eq!(
        error.to_string(),
        "KV codec `int8` cannot store rows of 128 values: it is defined for 256"
    );
    assert_eq!("bf16".parse::<KvDtype>().unwrap().check(&[3], 16), Ok(()));
    let kivi: KvDtype = "kivi4".parse().unwrap();
    assert_eq!(kivi.check(&[3], 64), Ok(()));
    let error = kivi.check(&[3], 80).unwrap_err().to_string();
    assert!(error.contains("values: it is defined for multiples of 32"), "{error}");
}

#[test]
fn kernel_options_belong_to_their_formats() {
    let options = |f: fn(&mut KernelOptions)| {
        let mut options = KernelOptions::default();
        f(&mut options);
        options
    };
    let original_int8 = options(|o| o.original_int8 = true);
    let original_nvfp4 = options(|o| o.original_nvfp4 = true);
    let fast = options(|o| o.fast_prefill = true);
    let eight_bit = options(|o| o.eight_bit_pv = EightBitPv::On);
    let check = |options: KernelOptions, name: &str| options.check(&name.parse().unwrap());
    assert!(check(original_int8, "int8").is_ok() && check(original_int8, "fp8").is_err());
    assert!(check(original_nvfp4, "nvfp4").is_ok() && check(original_nvfp4, "int8").is_err());
    assert!(check(fast, "rk4v4").is_ok() && check(fast, "int8").is_ok() && check(fast, "nvfp4").is_err());
    for name in ["int8", "nvfp4", "k8v4", "vq2", "k4v2"] {
        assert!(check(eight_bit, name).is_ok(), "{name}");
    }
    let refused = check(eight_bit, "fp8").unwrap_err().to_string();
    assert_eq!(
        refused,
        "--prefill-8bit-pv needs a KV cache of int8, nvfp4, k8v4, vq2 or k4v2, got `fp8`"
    );
}
