"""The names of the classes of the eight tasks, in the order of the labels, as they are put into sentences.

Where a dataset carries names they decide the order; see `tasks.class_names`. Names are CLIP's, with
its misspellings (`horizonal`, `bicyle`, `procenium`); docs/clip8.md says what they were compared with.
"""

from __future__ import annotations


def _listed(text: str) -> tuple[str, ...]:
    """Return the entries between `|`, with single spaces."""
    return tuple(" ".join(entry.split()) for entry in text.split("|"))


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a text, with spaces for `_` and `/` in them."""
    return tuple(word.replace("_", " ").replace("/", " ") for word in text.split())


SUN397 = _words(
    """
    abbey airplane_cabin airport_terminal alley amphitheater amusement_arcade amusement_park anechoic_chamber
    apartment_building/outdoor apse/indoor aquarium aqueduct arch archive arrival_gate/outdoor art_gallery art_school
    art_studio assembly_line athletic_field/outdoor atrium/public attic auditorium auto_factory badlands
    badminton_court/indoor baggage_claim bakery/shop balcony/exterior balcony/interior ball_pit ballroom bamboo_forest
    banquet_hall bar barn barndoor baseball_field basement basilica basketball_court/outdoor bathroom batters_box bayou
    bazaar/indoor bazaar/outdoor beach beauty_salon bedroom berth biology_laboratory bistro/indoor boardwalk boat_deck
    boathouse bookstore booth/indoor botanical_garden bow_window/indoor bow_window/outdoor bowling_alley boxing_ring
    brewery/indoor bridge building_facade bullring burial_chamber bus_interior butchers_shop butte cabin/outdoor
    cafeteria campsite campus canal/natural canal/urban candy_store canyon car_interior/backseat car_interior/frontseat
    carrousel casino/indoor castle catacomb cathedral/indoor cathedral/outdoor cavern/indoor cemetery chalet
    cheese_factory chemistry_lab chicken_coop/indoor chicken_coop/outdoor childs_room church/indoor church/outdoor
    classroom clean_room cliff cloister/indoor closet clothing_store coast cockpit coffee_shop computer_room
    conference_center conference_room construction_site control_room control_tower/outdoor corn_field corral corridor
    cottage_garden courthouse courtroom courtyard covered_bridge/exterior creek crevasse crosswalk cubicle/office dam
    delicatessen dentists_office desert/sand desert/vegetation diner/indoor diner/outdoor dinette/home dinette/vehicle
    dining_car dining_room discotheque dock doorway/outdoor dorm_room driveway driving_range/outdoor drugstore
    electrical_substation elevator/door elevator/interior elevator_shaft engine_room escalator/indoor excavation
    factory/indoor fairway fastfood_restaurant field/cultivated field/wild fire_escape fire_station firing_range/indoor
    fishpond florist_shop/indoor food_court forest/broadleaf forest/needleleaf forest_path forest_road formal_garden
    fountain galley game_room garage/indoor garbage_dump gas_station gazebo/exterior general_store/indoor
    general_store/outdoor gift_shop golf_course greenhouse/indoor greenhouse/outdoor gymnasium/indoor hangar/indoor
    hangar/outdoor harbor hayfield heliport herb_garden highway hill home_office hospital hospital_room hot_spring
    hot_tub/outdoor hotel/outdoor hotel_room house hunting_lodge/outdoor ice_cream_parlor ice_floe ice_shelf
    ice_skating_rink/indoor ice_skating_rink/outdoor iceberg igloo industrial_area inn/outdoor islet jacuzzi/indoor
    jail_cell jail/indoor jewelry_shop kasbah kennel/indoor kennel/outdoor kindergarden_classroom kitchen kitchenette
    labyrinth/outdoor lake/natural landfill landing_deck laundromat lecture_room library/indoor library/outdoor
    lido_deck/outdoor lift_bridge lighthouse limousine_interior living_room lobby lock_chamber locker_room mansion
    manufactured_home market/indoor market/outdoor marsh martial_arts_gym mausoleum medina moat/water monastery/outdoor
    mosque/indoor mosque/outdoor motel mountain mountain_snowy movie_theater/indoor museum/indoor music_store
    music_studio nuclear_power_plant/outdoor nursery oast_house observatory/outdoor ocean office office_building
    oil_refinery/outdoor oilrig operating_room orchard outhouse/outdoor pagoda palace pantry park parking_garage/indoor
    parking_garage/outdoor parking_lot parlor pasture patio pavilion pharmacy phone_booth physics_laboratory picnic_area
    pilothouse/indoor planetarium/outdoor playground playroom plaza podium/indoor podium/outdoor pond
    poolroom/establishment poolroom/home power_plant/outdoor promenade_deck pub/indoor pulpit putting_green racecourse
    raceway raft railroad_track rainforest reception recreation_room residential_neighborhood restaurant
    restaurant_kitchen restaurant_patio rice_paddy riding_arena river rock_arch rope_bridge ruin runway sandbar sandbox
    sauna schoolhouse sea_cliff server_room shed shoe_shop shopfront shopping_mall/indoor shower skatepark ski_lodge
    ski_resort ski_slope sky skyscraper slum snowfield squash_court stable stadium/baseball stadium/football
    stage/indoor staircase street subway_interior subway_station/platform supermarket sushi_bar swamp
    swimming_pool/indoor swimming_pool/outdoor synagogue/indoor synagogue/outdoor television_studio temple/east_asia
    temple/south_asia tennis_court/indoor tennis_court/outdoor tent/outdoor theater/indoor_procenium
    theater/indoor_seats thriftshop throne_room ticket_booth toll_plaza topiary_garden tower toyshop track/outdoor
    train_railway train_station/platform tree_farm tree_house trench underwater/coral_reef utility_room valley
    van_interior vegetable_garden veranda veterinarians_office viaduct videostore village vineyard volcano
    volleyball_court/indoor volleyball_court/outdoor waiting_room warehouse/indoor water_tower waterfall/block
    waterfall/fan waterfall/plunge watering_hole wave wet_bar wheat_field wind_farm windmill wine_cellar/barrel_storage
    wine_cellar/bottle_storage wrestling_ring/indoor yard youth_hostel
    """
)

CARS = _listed(
    """AM General Hummer SUV 2000|Acura RL Sedan 2012|Acura TL Sedan 2012|Acura TL Type-S 2008|Acura TSX Sedan 2012|
    Acura Integra Type R 2001|Acura ZDX Hatchback 2012|Aston Martin V8 Vantage Convertible 2012|
    Aston Martin V8 Vantage Coupe 2012|Aston Martin Virage Convertible 2012|Aston Martin Virage Coupe 2012|
    Audi RS 4 Convertible 2008|Audi A5 Coupe 2012|Audi TTS Coupe 2012|Audi R8 Coupe 2012|Audi V8 Sedan 1994|
    Audi 100 Sedan 1994|Audi 100 Wagon 1994|Audi TT Hatchback 2011|Audi S6 Sedan 2011|Audi S5 Convertible 2012|
    Audi S5 Coupe 2012|Audi S4 Sedan 2012|Audi S4 Sedan 2007|Audi TT RS Coupe 2012|BMW ActiveHybrid 5 Sedan 2012|
    BMW 1 Series Convertible 2012|BMW 1 Series Coupe 2012|BMW 3 Series Sedan 2012|BMW 3 Series Wagon 2012|
    BMW 6 Series Convertible 2007|BMW X5 SUV 2007|BMW X6 SUV 2012|BMW M3 Coupe 2012|BMW M5 Sedan 2010|
    BMW M6 Convertible 2010|BMW X3 SUV 2012|BMW Z4 Convertible 2012|
    Bentley Continental Supersports Conv. Convertible 2012|Bentley Arnage Sedan 2009|Bentley Mulsanne Sedan 2011|
    Bentley Continental GT Coupe 2012|Bentley Continental GT Coupe 2007|Bentley Continental Flying Spur Sedan 2007|
    Bugatti Veyron 16.4 Convertible 2009|Bugatti Veyron 16.4 Coupe 2009|Buick Regal GS 2012|Buick Rainier SUV 2007|
    Buick Verano Sedan 2012|Buick Enclave SUV 2012|Cadillac CTS-V Sedan 2012|Cadillac SRX SUV 2012|
    Cadillac Escalade EXT Crew Cab 2007|Chevrolet Silverado 1500 Hybrid Crew Cab 2012|
    Chevrolet Corvette Convertible 2012|Chevrolet Corvette ZR1 2012|Chevrolet Corvette Ron Fellows Edition Z06 2007|
    Chevrolet Traverse SUV 2012|Chevrolet Camaro Convertible 2012|Chevrolet HHR SS 2010|Chevrolet Impala Sedan 2007|
    Chevrolet Tahoe Hybrid SUV 2012|Chevrolet Sonic Sedan 2012|Chevrolet Express Cargo Van 2007|
    Chevrolet Avalanche Crew Cab 2012|Chevrolet Cobalt SS 2010|Chevrolet Malibu Hybrid Sedan 2010|
    Chevrolet TrailBlazer SS 2009|Chevrolet Silverado 2500HD Regular Cab 2012|
    Chevrolet Silverado 1500 Classic Extended Cab 2007|Chevrolet Express Van 2007|Chevrolet Monte Carlo Coupe 2007|
    Chevrolet Malibu Sedan 2007|Chevrolet Silverado 1500 Extended Cab 2012|Chevrolet Silverado 1500 Regular Cab 2012|
    Chrysler Aspen SUV 2009|Chrysler Sebring Convertible 2010|Chrysler Town and Country Minivan 2012|
    Chrysler 300 SRT-8 2010|Chrysler Crossfire Convertible 2008|Chrysler PT Cruiser Convertible 2008|
    Daewoo Nubira Wagon 2002|Dodge Caliber Wagon 2012|Dodge Caliber Wagon 2007|Dodge Caravan Minivan 1997|
    Dodge Ram Pickup 3500 Crew Cab 2010|Dodge Ram Pickup 3500 Quad Cab 2009|Dodge Sprinter Cargo Van 2009|
    Dodge Journey SUV 2012|Dodge Dakota Crew Cab 2010|Dodge Dakota Club Cab 2007|Dodge Magnum Wagon 2008|
    Dodge Challenger SRT8 2011|Dodge Durango SUV 2012|Dodge Durango SUV 2007|Dodge Charger Sedan 2012|
    Dodge Charger SRT-8 2009|Eagle Talon Hatchback 1998|FIAT 500 Abarth 2012|FIAT 500 Convertible 2012|
    Ferrari FF Coupe 2012|Ferrari California Convertible 2012|Ferrari 458 Italia Convertible 2012|
    Ferrari 458 Italia Coupe 2012|Fisker Karma Sedan 2012|Ford F-450 Super Duty Crew Cab 2012|
    Ford Mustang Convertible 2007|Ford Freestar Minivan 2007|Ford Expedition EL SUV 2009|Ford Edge SUV 2012|
    Ford Ranger SuperCab 2011|Ford GT Coupe 2006|Ford F-150 Regular Cab 2012|Ford F-150 Regular Cab 2007|
    Ford Focus Sedan 2007|Ford E-Series Wagon Van 2012|Ford Fiesta Sedan 2012|GMC Terrain SUV 2012|GMC Savana Van 2012|
    GMC Yukon Hybrid SUV 2012|GMC Acadia SUV 2012|GMC Canyon Extended Cab 2012|Geo Metro Convertible 1993|
    HUMMER H3T Crew Cab 2010|HUMMER H2 SUT Crew Cab 2009|Honda Odyssey Minivan 2012|Honda Odyssey Minivan 2007|
    Honda Accord Coupe 2012|Honda Accord Sedan 2012|Hyundai Veloster Hatchback 2012|Hyundai Santa Fe SUV 2012|
    Hyundai Tucson SUV 2012|Hyundai Veracruz SUV 2012|Hyundai Sonata Hybrid Sedan 2012|Hyundai Elantra Sedan 2007|
    Hyundai Accent Sedan 2012|Hyundai Genesis Sedan 2012|Hyundai Sonata Sedan 2012|
    Hyundai Elantra Touring Hatchback 2012|Hyundai Azera Sedan 2012|Infiniti G Coupe IPL 2012|Infiniti QX56 SUV 2011|
    Isuzu Ascender SUV 2008|Jaguar XK XKR 2012|Jeep Patriot SUV 2012|Jeep Wrangler SUV 2012|Jeep Liberty SUV 2012|
    Jeep Grand Cherokee SUV 2012|Jeep Compass SUV 2012|Lamborghini Reventon Coupe 2008|
    Lamborghini Aventador Coupe 2012|Lamborghini Gallardo LP 570-4 Superleggera 2012|Lamborghini Diablo Coupe 2001|
    Land Rover Range Rover SUV 2012|Land Rover LR2 SUV 2012|Lincoln Town Car Sedan 2011|
    MINI Cooper Roadster Convertible 2012|Maybach Landaulet Convertible 2012|Mazda Tribute SUV 2011|
    McLaren MP4-12C Coupe 2012|Mercedes-Benz 300-Class Convertible 1993|Mercedes-Benz C-Class Sedan 2012|
    Mercedes-Benz SL-Class Coupe 2009|Mercedes-Benz E-Class Sedan 2012|Mercedes-Benz S-Class Sedan 2012|
    Mercedes-Benz Sprinter Van 2012|Mitsubishi Lancer Sedan 2012|Nissan Leaf Hatchback 2012|
    Nissan NV Passenger Van 2012|Nissan Juke Hatchback 2012|Nissan 240SX Coupe 1998|Plymouth Neon Coupe 1999|
    Porsche Panamera Sedan 2012|Ram C/V Cargo Van Minivan 2012|Rolls-Royce Phantom Drophead Coupe Convertible 2012|
    Rolls-Royce Ghost Sedan 2012|Rolls-Royce Phantom Sedan 2012|Scion xD Hatchback 2012|Spyker C8 Convertible 2009|
    Spyker C8 Coupe 2009|Suzuki Aerio Sedan 2007|Suzuki Kizashi Sedan 2012|Suzuki SX4 Hatchback 2012|
    Suzuki SX4 Sedan 2012|Tesla Model S Sedan 2012|Toyota Sequoia SUV 2012|Toyota Camry Sedan 2012|
    Toyota Corolla Sedan 2012|Toyota 4Runner SUV 2012|Volkswagen Golf Hatchback 2012|Volkswagen Golf Hatchback 1991|
    Volkswagen Beetle Hatchback 2012|Volvo C30 Hatchback 2012|Volvo 240 Sedan 1993|Volvo XC90 SUV 2007|
    smart fortwo Convertible 2012"""
)

RESISC45 = _listed(
    """airplane|airport|baseball diamond|basketball court|beach|bridge|chaparral|church|circular farmland|cloud|
    commercial area|dense residential|desert|forest|freeway|golf course|ground track field|harbor|industrial area|
    intersection|island|lake|meadow|medium residential|mobile home park|mountain|overpass|palace|parking lot|railway|
    railway station|rectangular farmland|river|roundabout|runway|sea ice|ship|snowberg|sparse residential|stadium|
    storage tank|tennis court|terrace|thermal power station|wetland"""
)

EUROSAT = _listed(
    """annual crop land|forest|brushland or shrubland|highway or road|industrial buildings or commercial buildings|
    pasture land|permanent crop land|residential buildings or homes or apartments|river|lake or sea"""
)
EUROSAT_FOLDERS = _listed(
    """AnnualCrop|Forest|HerbaceousVegetation|Highway|Industrial|Pasture|PermanentCrop|Residential|River|SeaLake"""
)
"""the names of the folders EuroSAT is published in, in the same order"""

DIGITS = tuple("0123456789")

GTSRB = _listed(
    """red and white circle 20 kph speed limit|red and white circle 30 kph speed limit|
    red and white circle 50 kph speed limit|red and white circle 60 kph speed limit|
    red and white circle 70 kph speed limit|red and white circle 80 kph speed limit|
    end / de-restriction of 80 kph speed limit|red and white circle 100 kph speed limit|
    red and white circle 120 kph speed limit|red and white circle red car and black car no passing|
    red and white circle red truck and black car no passing|red and white triangle road intersection warning|
    white and yellow diamond priority road|red and white upside down triangle yield right-of-way|stop|
    empty red and white circle|red and white circle no truck entry|red circle with white horizonal stripe no entry|
    red and white triangle with exclamation mark warning|
    red and white triangle with black left curve approaching warning|
    red and white triangle with black right curve approaching warning|
    red and white triangle with black double curve approaching warning|
    red and white triangle rough / bumpy road warning|
    red and white triangle car skidding / slipping warning|
    red and white triangle with merging / narrow lanes warning|
    red and white triangle with person digging / construction / road work warning|
    red and white triangle with traffic light approaching warning|
    red and white triangle with person walking warning|red and white triangle with child and person walking warning|
    red and white triangle with bicyle warning|red and white triangle with snowflake / ice warning|
    red and white triangle with deer warning|white circle with gray strike bar no speed limit|
    blue circle with white right turn arrow mandatory|blue circle with white left turn arrow mandatory|
    blue circle with white forward arrow mandatory|blue circle with white forward or right turn arrow mandatory|
    blue circle with white forward or left turn arrow mandatory|blue circle with white keep right arrow mandatory|
    blue circle with white keep left arrow mandatory|blue circle with white arrows indicating a traffic circle|
    white circle with gray strike bar indicating no passing for cars has ended|
    white circle with gray strike bar indicating no passing for trucks has ended"""
)

DTD = _words(
    """
    banded blotchy braided bubbly bumpy chequered cobwebbed cracked crosshatched crystalline dotted fibrous flecked
    freckled frilly gauzy grid grooved honeycombed interlaced knitted lacelike lined marbled matted meshed paisley
    perforated pitted pleated polka-dotted porous potholed scaly smeared spiralled sprinkled stained stratified striped
    studded swirly veined waffled woven wrinkled zigzagged
    """
)
