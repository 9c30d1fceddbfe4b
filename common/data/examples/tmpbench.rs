use steadfast_common::dataset::*; use steadfast_common::spec::*; use steadfast_common::ids::*;
#[tokio::main] async fn main() {
    let mut a = std::env::args().skip(1);
    let src = a.next().unwrap(); let per: Option<u32> = a.next().unwrap().parse().ok();
    let format = if src.ends_with("parquet") { DataFormat::Parquet } else { DataFormat::Csv };
    let s = DatasetSpec{source:vec![src], format, features:vec!["x*".into()], label:"y".into(), feature_scale:1.0, records_per_task:per, header:Header::Present};
    let t = std::time::Instant::now();
    let m = steadfast_data::plan(&s, 0.1, None).await.unwrap();
    println!("plan {:?} tasks {} chunks {}", t.elapsed(), m.task_count(), m.chunks.len());
    let o = ReadOptions::new(&s, &m);
    let t = std::time::Instant::now(); let mut n = 0; let mut k=0;
    for i in 0..m.task_count().min(200) { n += steadfast_data::read(&m,&o,m.chunks_of(TaskId(i))).await.unwrap().len(); k+=1; }
    println!("read {k} tasks {n} records {:?}", t.elapsed());
    println!("{}", std::fs::read_to_string("/proc/self/status").unwrap().lines().find(|l| l.starts_with("VmHWM")).unwrap());
}
