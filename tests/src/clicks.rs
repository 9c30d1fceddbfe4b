//! Generated clicks, for jobs with an embedding table.

/// Ids of users and of items.
const USERS: u64 = 6_000;
const ITEMS: u64 = 4_000;

/// Returns CSV with the columns `click`, `hour`, `user`, `item` and `city`. Users and items follow a power law, and
/// each leans towards clicks or away from them. The same number of records gives the same text.
pub fn clicks(records: usize) -> String {
    let mut text = String::from("click,hour,user,item,city\n");
    let mut state = 1;
    let mut random = || {
        state = mixed(state);
        state as f64 / u64::MAX as f64
    };
    // The square of a uniform number makes low ids frequent.
    let mut drawn = |ids: u64| (random().powi(2) * ids as f64) as u64;
    for _ in 0..records {
        let (user, item, city) = (drawn(USERS), drawn(ITEMS), drawn(8));
        let leaning = 2 * (mixed(user) % 2) + mixed(item + USERS) % 2;
        let (click, hour) = (u8::from(2 <= leaning), drawn(24));
        text += &format!("{click},{hour},u{user},i{item},c{city}\n");
    }
    text
}

/// Returns the next output of SplitMix64 from its state.
pub fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
